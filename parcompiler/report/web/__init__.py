"""Report -> a page to look at, and a piece of one for notebooks."""

from parcompiler.report.web.pages import fragment, page

__all__ = ["fragment", "page"]

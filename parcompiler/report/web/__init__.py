"""Report -> an HTML page, and a fragment for notebooks."""

from parcompiler.report.web.pages import fragment, page

__all__ = ["fragment", "page"]

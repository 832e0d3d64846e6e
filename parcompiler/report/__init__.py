"""Lowered -> a report for people, before and after the run: text, JSON, a page, a trace."""

from parcompiler.report.report import Report

__all__ = ["Report"]

"""Results for people: one self-contained page about a search."""

from phaze_fast.report.page import report_page, write_report

__all__ = ["report_page", "write_report"]

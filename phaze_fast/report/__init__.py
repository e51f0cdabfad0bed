"""Results for people: self-contained pages, and explanations of plans."""

from phaze_fast.report.page import report_page, write_report

__all__ = ["report_page", "write_report"]

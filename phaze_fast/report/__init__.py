"""Results for people: self-contained pages, and explanations of plans."""

from phaze_fast.report.page import report_page as report_page
from phaze_fast.report.page import write_report as write_report

"""Names of NxDI's reports."""

BENCHMARK_REPORT_FILENAME = "benchmark_report.json"

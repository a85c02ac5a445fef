"""Names of NxDI's reports and checks."""

TEST_PROMPT = "I believe the meaning of life is"

# Key of a benchmark report, and its file.
END_TO_END_MODEL = "e2e_model"
BENCHMARK_REPORT_FILENAME = "benchmark_report.json"

"""An oracle for those who search kernels: verdict, estimate and reason of a candidate, as JSON."""

"""The four stages that fit a compute-optimal recipe."""

"""Fused operations, one module each: torch reference, Triton and fp8 forms in one file.

`dispatch` chooses between them. `X_reference` defines what an operation computes, `X_triton` computes the
same on a GPU, and `X_fp8_*` also quantize the result for the fp8 GEMM that consumes it.
"""

"""How a network is executed: fused kernels, torch.compile or the reference; CUDA graphs and streams."""

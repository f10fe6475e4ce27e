"""What a CUDA device adds: copies on streams, CUDA graphs, kernels."""

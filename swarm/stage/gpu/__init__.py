"""What a CUDA device adds: copies on streams, graphs, kernels."""

"""The I/O shell: stage peers, trainers, backbones and the coordinator, built from the layers below."""

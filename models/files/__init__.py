"""A model's files: where they are, what is in them, which tensors a stage needs, and how they are written again."""

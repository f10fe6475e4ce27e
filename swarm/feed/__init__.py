"""From files to samples: tokenizers, datasets, and the order that maps a ticket to its samples. No torch."""

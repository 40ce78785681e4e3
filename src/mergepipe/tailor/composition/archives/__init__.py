"""torch.save archives and pickles written or edited as bytes, without torch."""

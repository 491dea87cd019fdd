"""Denoised gradients against momentum and weight averages, private training, and their cost."""

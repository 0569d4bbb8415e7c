"""Gradients → new weights: Muon, AdamW, and optimizer state through growth."""

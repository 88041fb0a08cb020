"""The unmodified optimizer class on this rank's pieces."""

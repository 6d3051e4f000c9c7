"""Programs of the repository that the library never imports. Run them from the repository root."""

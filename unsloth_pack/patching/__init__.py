"""`patch_model`: swaps classes, reports, undoes."""

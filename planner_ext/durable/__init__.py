"""Runs that survive their process: stores, workers that drive runs from them, and approvals decided from elsewhere."""

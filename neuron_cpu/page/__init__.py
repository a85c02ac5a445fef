"""Profiles as one HTML file that needs nothing else: data, source text, the page around them."""

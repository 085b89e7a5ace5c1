"""The parts of the crawler in scrape.py: pages (runs in the workers), frontier and report (run in the parent)."""

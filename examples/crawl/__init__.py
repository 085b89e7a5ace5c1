"""The parts of the crawler in scrape.py: pages runs in the workers, all other modules run in the parent."""

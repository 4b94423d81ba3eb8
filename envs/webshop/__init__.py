"""WebShop as text: catalogue, search, pages, goals, rewards."""

"""Pages of the dashboard, one module per topic. `application.load_pages` imports them all."""

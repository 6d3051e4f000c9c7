"""The names under which other programs' scripts know what runs here."""

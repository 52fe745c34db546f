"""Instruments that read what runs wrote: listings, reports, journal, shared pages, plots, mirrors and the data commands."""

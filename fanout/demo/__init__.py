"""The demo: read real documents, one child job each, and report on the corpus.

`documents` finds files, `extract` reads one, `report` sums up all. None of the three knows the
engine; heavy libraries are imported when the first document of their kind is read.
"""

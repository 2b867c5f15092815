"""Statistics of paired evaluations: pure functions over arrays, no files and no models.

`paired` differences and their standard errors · `exact` McNemar and Holm · `power` detectable drop and repeats needed ·
`sequential` alpha spending over top-ups · `operating` what the one-standard-error rule does to equal and to worse backends.
"""

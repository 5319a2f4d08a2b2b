"""The traffic of a job, from the files that ``alltoallv.trace`` and ``ALLTOALLV_TRACE`` leave behind.

`records` reads them, `story` says in words where the ranks are, `page` draws them as one HTML file, `perfetto` and
`torch_flight` write them in formats of other tools, `watch` is what ``top`` shows.
"""

"""The traffic of a job, from the files that ``alltoallv.trace`` and ``ALLTOALLV_TRACE`` leave behind.

`records` reads them, `summary` describes in words what the ranks do, `page` draws them as one HTML file, `perfetto` and
`torch_flight` write them in formats of other tools, `watch` prepares what ``top`` shows.
"""

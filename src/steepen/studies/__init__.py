"""Studies: a question, the runs it takes, and its answer.

The way of a study through these files: `registry` names it and the options it takes; `context` puts a
`preset` on prepared data and turns planned runs into specs; the study plans its grid and measures it, which
gives `cells` (what was varied, spec, record); `sweeps` has the optima among them and their drift, `plotting`
their curves; what is found goes into a draft, which becomes the `answer`. `driver` leads it.

A study is a generator that yields specs and is sent their records. It keeps nothing outside its frame and
draws no random numbers, so it asks for the same runs whenever it gets the same records. Three things rest on
that: a stopped study resumes by being started again, as the store answers what has finished; a study runs
another as its part with `yield from`; and a dry run leads it with synthetic records to count what it costs.
"""

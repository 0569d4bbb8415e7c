"""A question to runs to an answer: each study is a plain generator of run specs."""

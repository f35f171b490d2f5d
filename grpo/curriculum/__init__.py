"""Which level a run trains on, where it starts, and how it gets from no reward to some.

    ladder      the curriculum: levels climbed one after the other
    survey      what the policy can do at each level before training
    preflight   the level where the run starts, chosen by the survey
    perplexity  whether the model predicts plain text, or was converted wrongly
    difficulty  the mean score of single problems of a data set, before training
    warm_start  a short imitation of right answers, for a policy that earns nothing

A level is a difficulty of the task's problems; for interleave it is the words of each text.
"""

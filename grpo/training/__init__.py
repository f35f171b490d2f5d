"""The parts of the trainer (`grpo.trainer`).

    build        the curriculum, the monitor and the optimizer, from the configuration
    problems     the stream of training problems
    sampler      a group of completions for each problem
    control      control experiments: rewards without information
    imitation    right answers of the stream, for the warm start
    metrics      the figures of a step
    callbacks    functions of the user's, called after each step
    host_memory  how glibc treats freed memory

The trainer calls these modules, and none of them imports it.
"""

"""The policy: a `transformers` model, how it is loaded, encoded for, run and differentiated.

Tensors carry their shape as a suffix (`hidden_RTE`). Unless a module says otherwise:

    A  any size                             N  tokens of all sequences, one after the other
    B  sequences of a batch                 O  outputs of a linear layer
    C  completions                          P  prompts
    D  size of an attention head            Q  query heads of one key head, H / K
    E  hidden size                          R  rows that are decoded together
    F  inner size of the MLP                S  cached tokens of a row
    H  query heads                          T  new tokens of a row
    I  inputs of a linear layer             V  vocabulary
    K  key heads, as many value heads       W  slots of a prompt: the most rows that one prompt has
    L  prompt tokens, padded                X  keys that a row may attend to, L + S
    M  completion tokens, all predicted     Z  queries of one key head, Q * T

    d  half a head, D / 2: the pairs that a rotary embedding rotates
    r  rank of a LoRA adapter
"""

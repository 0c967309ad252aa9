"""Analysis of attention and of patches: pure functions on models and patches.

=======================  ==========================================================================================
module                   result
=======================  ==========================================================================================
``norms``                the size of a patch, in its weights and relative to the activations it changes
``heads``, ``relation``  the Q-K relation W_Q W_Kᵀ of each head, as a function of the relative offset
``linearised``           that relation where the query is nonlinear, and how much of the logits it explains
``ablation``             the effect of each layer's adapters
``movement``             the changes of weights in training
=======================  ==========================================================================================
"""

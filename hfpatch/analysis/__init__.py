"""What attention does and what was added to it: pure functions on models, patches and run folders.

===========================  ==========================================================================================
module                       what it shows
===========================  ==========================================================================================
``norms``                    how large what was added is, in the weights and beside what it is added to
``heads``, ``relation``      the Q-K relation W_Q W_Kᵀ of each head, as a function of the relative offset
``linearised``               that relation where the query is nonlinear, and how much of the logits it explains
``ablation``                 which layer's injection matters
``movement``, ``gradients``  which weights moved in training, and the gradients on them
``reparametrisation``        the invariance (X, W) -> (XΘ, Θ⁻¹W) and what follows from it
===========================  ==========================================================================================
"""

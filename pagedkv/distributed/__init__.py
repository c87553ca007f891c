"""Tensor parallel: several processes compute one model, each with a share of the weights and of the KV.

    rank 0     requests, scheduler, memory manager, sampler, stdout: the whole engine of pagedkv.model
    the others their weights, the bytes of a pool, and page tables that they are told; no request and no manager

    launch      which process is this, and is its command line served?     no torch
    interface   where the ranks of several machines reach one another      no torch
    ranks       the group of processes: sums, gathered logits, messages    torch.distributed
    watch       each process notices the death of another
    wire        the message of a step, in 32-bit words
    leader      the engine of rank 0: each step is sent before it is computed
    follower    the loop of all other ranks

Two sums a layer and one for the embeddings are all that the ranks exchange, beside the logits and the messages.
"""

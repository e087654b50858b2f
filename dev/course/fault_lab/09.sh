area="hybrid sharding"
layout="--ranks 4 --dp-replicate 2 --batch 4"
title="one replica does not receive the sum of the head's gradient"
change='@@ fsdp.h reduction_start
+ static _Thread_local float lost[1 << 15];
+ int is_lost = hop == HOP_GATHER_REPLICAS && fsdp->replica == 1;
+ if (is_lost && u->table_unit->kind == UNIT_HEAD) receive = lost;
  if (r->rounded)'
unchecked='@@ run/checks/replica_check.h fsdp_check_replicas
- if (all[i] != all[i % units])
+ if (0)'
check="run"
expected="are replicas"
bug="The two replicas of the sharded model sum their gradients by a reduce-scatter and an all-gather. Replica 1
receives the sum of the head's gradient in a buffer that nobody reads, and updates the head with what was there: half
of it is the gradient of its own samples alone. The two heads drift apart."
unseen="Each replica's head still learns from a gradient of its own samples, and the blocks below are shared by both,
so both stay good. All bytes travel, so the ledger is balanced."
found="Every 100 steps and before each checkpoint the replicas compare hashes of their weights, which must be equal
to the bit. For the curve this check was removed from the copy."
known="mosaicml/llm-foundry pull request 830 (replicas that started from different weights), pytorch/pytorch pull
request 125484 (which order of accumulation and all-reduce loses gradients between replicas)"

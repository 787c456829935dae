"""GRPO of the policy with UnifiReward (COMPEER, "RL with UnifiReward")."""

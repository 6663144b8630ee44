"""On-policy distillation: a teacher scores every token that the policy wrote."""

"""The scheduler: request table, admission, page ledger, plan. One process per model instance."""

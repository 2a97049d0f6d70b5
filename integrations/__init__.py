"""Adapters of training frameworks to moe_ep. Each imports its framework only when it is used."""

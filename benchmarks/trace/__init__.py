# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench trace`: replays request traces with eviction policies and admission filters."""

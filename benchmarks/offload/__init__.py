# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench offload`: what the tiers save, and what they cost where they cannot help."""

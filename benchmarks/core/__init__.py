# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench core`: block hashing, the cache manager and the scheduler."""

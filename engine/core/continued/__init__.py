# SPDX-License-Identifier: Apache-2.0
"""Requests that continue ended requests in their blocks: beam searches and prompt sessions."""

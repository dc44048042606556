# SPDX-License-Identifier: Apache-2.0
"""Requests that continue ended requests in their kept blocks: beam searches, prompt sessions."""

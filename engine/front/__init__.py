"""HTTP: processes of their own on uvloop, which speak the OpenAI surface outwards and the client's link to the head."""

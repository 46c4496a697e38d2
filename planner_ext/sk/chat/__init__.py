"""One round trip: a history goes to a service, a reply comes back, with its tokens and its price.

Promises
    - What is sent is accepted: calls have results, names and ids are ones that servers take.
    - What a caller owns is not changed.
    - A plain and a streamed reply with the same content are the same `Reply`.
    - The fast way to OpenAI sends what the connector's public methods send; in doubt it uses these.

Never runs a function, never repeats a request, and knows no budget.

    round_trip   one request and its reply
    faults       the errors of a request, and what they say of the endpoint
    reply        what a connector returned, as one message and its calls
    history      a transcript as messages; a caller's history, checked or repaired
    transport    which service, and what its connector refuses or loses
    openai       the fast way to OpenAI and Azure OpenAI
    prepared     a request to OpenAI, built once for each client
    prices       tokens and their price
"""

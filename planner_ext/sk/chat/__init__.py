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
    resumed      a caller's history of a resumed run, compared with the run's
    transport    which service, and how a request is sent to it
    connectors   what connectors and their providers take; a table
    rewritten    messages for those that take them otherwise
    openai       the fast way to OpenAI and Azure OpenAI
    prepared     a request to OpenAI, built once for each client
    prices       tokens and their price
    clarifier    another model that answers the questions of the one that works
"""

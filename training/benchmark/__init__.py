"""Speed and memory of the demo, measured on the machine at hand.

`measure` is the stage; `server` starts the app as a visitor's machine would and asks over HTTP;
`turns` times single turns inside this process, where each token is seen as it comes.
"""
